# The image of Docker sandboxes: what a coding agent expects, and a user of its own. `sandgate images build` builds it.
FROM debian:bookworm-slim

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        bash ca-certificates git make python3 python3-pip python3-venv ripgrep \
    && rm -rf /var/lib/apt/lists/* \
    # Debian refuses `pip install --user`; here the whole system is the agent's, and read-only
    && rm -f /usr/lib/python3*/EXTERNALLY-MANAGED \
    && ln -s python3 /usr/bin/python \
    && useradd --uid 1000 --user-group --create-home --shell /bin/bash agent \
    && install -d -o agent -g agent /workspace

ENV PATH=/home/agent/.local/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8
USER agent
WORKDIR /workspace
