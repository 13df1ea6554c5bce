import pytest
from tests.gateway.conftest import Served
pytestmark = [pytest.mark.anyio, pytest.mark.needs("local")]

async def test_first(server: Served) -> None:
    print((await server.anonymous.get("/healthz")).text, (await server.anonymous.get("/readyz")).text)
    s = await server.session(seed=[{"path": "a.txt", "text": "hello"}])
    print(await server.call(s, "bash", command="cat a.txt; seq 1 20000"))
    async with server.agent.stream("POST", f"/v1/sessions/{s['id']}/calls", json={"tool":"bash","arguments":{"command":"echo a; sleep 0.3; echo b; echo c >&2"}}, headers={"accept":"text/event-stream"}) as r:
        async for line in r.aiter_lines(): print(line)
    print((await server.agent.put(f"/v1/sessions/{s['id']}/files/x/y%20z.txt", content=b"abc")).text)
    for p in ("files", "files?recursive=true", "files/x/y%20z.txt", "files/%2e%2e/x", "calls", "results", "results/0001-bash-stdout?lines=2-3", "results/0001-bash-stdout?grep=^999", "tools?format=openai"):
        r = await server.agent.get(f"/v1/sessions/{s['id']}/{p}")
        print(p, r.status_code, r.text[:300])
    r = await server.agent.get(f"/v1/sessions/{s['id']}/results/0001-bash-stdout", headers={"range":"bytes=5-9"})
    print(r.status_code, r.text, r.headers)
    print((await server.anonymous.get("/v1/sessions")).text)
    print((await server.agent.delete(f"/v1/sessions/{s['id']}")).text)
    import time
    s = await server.session()
    t=time.perf_counter()
    for i in range(200): await server.call(s,"bash",command="echo hi")
    print("ms", (time.perf_counter()-t)*5)
