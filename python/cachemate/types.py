"""Types of dictionaries in arguments and results."""

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
    """Mean over all programs; the model determines which of the two is set."""

    mean_slowdown_percent: float | None
    mean_weight: float | None


class View(TypedDict):
    """The input of a policy, with the fields of a run log."""

    topology: dict[str, Any]
    capabilities: dict[str, Any]
    observation: dict[str, Any]
    profiles: Any
    previous_plan: dict[str, Any]


class Answer(TypedDict, total=False):
    """The output of a policy; an omitted field is the machine's default."""

    affinity: dict[Any, str]
    weights: Any
    gangs: list[Any]
    shares: list[Any]
    penalties: list[Any]
    probes: list[Any]
    window: dict[str, Any]
    reasons: list[str]
