"""Figure: one measured number, what it should be, and whether it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """`target` is the bound that `holds` was judged by; both are None for what is only shown beside."""

    name: str
    value: float
    unit: str
    target: str | None = None
    holds: bool | None = None
    note: str = ""


def at_most(name: str, value: float, unit: str, bound: float, note: str = "") -> Figure:
    return Figure(name, value, unit, f"<= {bound:g}", value <= bound, note)


def at_least(name: str, value: float, unit: str, bound: float, note: str = "") -> Figure:
    return Figure(name, value, unit, f">= {bound:g}", value >= bound, note)


def shown(name: str, value: float, unit: str, note: str = "") -> Figure:
    return Figure(name, value, unit, note=note)
