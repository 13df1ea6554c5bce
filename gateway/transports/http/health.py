"""Health: alive, and ready or why not. No token: what is told is what the machine cannot do, nothing of sessions."""

from fastapi import APIRouter, Response
from pydantic import BaseModel

from gateway.transports.http.app import TheGateway

router = APIRouter(tags=["health"])


class Alive(BaseModel):
    """The process answers."""

    status: str = "alive"


class PartHealth(BaseModel):
    """One kind of sandbox, or the store: what `probe()` says of it."""

    name: str
    works: bool
    reason: str = ""
    remedy: str = ""
    not_enforced: list[str] = []


class Ready(BaseModel):
    """`ready` only if every kind that a profile names, and the store, work."""

    ready: bool
    kinds: list[PartHealth]
    store: PartHealth


@router.get("/healthz")
async def healthz() -> Alive:
    return Alive()


@router.get("/readyz")
async def readyz(gateway: TheGateway, response: Response) -> Ready:
    """503 with reason and remedy where a part does not work."""
    kinds = [
        PartHealth(
            name=one.kind, works=one.works, reason=one.reason, remedy=one.remedy, not_enforced=list(one.not_enforced)
        )
        for one in await gateway.probes()
    ]
    probe = await gateway.results.probe()
    store = PartHealth(name="store", works=probe.works, reason=probe.reason, remedy=probe.remedy)
    ready = store.works and all(one.works for one in kinds) and not gateway.stopping
    response.status_code = 200 if ready else 503
    return Ready(ready=ready, kinds=kinds, store=store)
