# The image of the gateway, for compose.yaml. `sandgate images build` builds it, or from the root of a clone:
# docker build -f docker/gateway.Dockerfile -t sandgate/gateway .
FROM debian:bookworm-slim

# haproxy is for compose.proxy.yaml
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates haproxy python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/sandgate \
    && useradd --uid 1000 --user-group --create-home sandgate
ENV PATH=/opt/sandgate/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# first what it needs, which changes seldom; ca-bundle.crt, at the root of the clone, is for a network that re-signs
COPY pyproject.toml ca-bundle.cr[t] /src/
RUN [ ! -e /src/ca-bundle.crt ] || export PIP_CERT=/src/ca-bundle.crt; \
    python3 -c 'import tomllib; project = tomllib.load(open("/src/pyproject.toml", "rb"))["project"]; \
print(*project["dependencies"], *project["optional-dependencies"]["server"], sep="\n")' > /src/requirements.txt \
    && pip install --requirement /src/requirements.txt

COPY . /src/
RUN [ ! -e /src/ca-bundle.crt ] || export PIP_CERT=/src/ca-bundle.crt; \
    pip install --no-deps /src \
    && install -D -m 0644 /src/gateway/cli/context/haproxy.cfg /etc/sandgate/haproxy.cfg \
    && rm -rf /src

USER sandgate
WORKDIR /home/sandgate
ENTRYPOINT ["sandgate"]
CMD ["serve"]
