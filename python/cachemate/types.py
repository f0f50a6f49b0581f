"""Types of what is given and taken as dictionaries."""

from typing import Any, TypedDict


class PlacedProgram(TypedDict):
    """One program in a plan."""

    name: str
    cpu: int
    cache: int | None
    co_runners: list[str]
    shares_cpu_with: list[str]
    slowdown_percent: float | None
    weight: float | None
    reason: str


class Outcome(TypedDict):
    """Mean over all programs; which of the two is there follows from the model."""

    mean_slowdown_percent: float | None
    mean_weight: float | None


class View(TypedDict):
    """What a policy may see: the same as in a run log."""

    topology: dict[str, Any]
    capabilities: dict[str, Any]
    seen: dict[str, Any]
    profiles: Any
    previous_plan: dict[str, Any]


class Answer(TypedDict, total=False):
    """What a policy wants; what is left out is the machine's default."""

    affinity: dict[Any, str]
    weights: Any
    gangs: list[Any]
    shares: list[Any]
    penalties: list[Any]
    probes: list[Any]
    window: dict[str, Any]
    why: list[str]
