from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from .types import Answer, Outcome, PlacedProgram, View

__all__ = [
    "CachemateError",
    "Curve",
    "Matrix",
    "Plan",
    "Profile",
    "RunLog",
    "RunLogWindows",
    "Trace",
    "__version__",
    "machines",
    "models",
    "mrc",
    "plan",
    "predict",
    "profile",
    "record",
    "simulate",
]

__version__: str

class CachemateError(Exception): ...

@final
class Trace:
    @staticmethod
    def from_numpy(
        addresses: NDArray[np.uint64] | NDArray[np.int64],
        *,
        instructions: NDArray[np.uint64] | NDArray[np.int64] | None = None,
        name: str = "array",
    ) -> Trace: ...
    @staticmethod
    def open(path: str | PathLike[str], *, format: str | None = None, name: str | None = None) -> Trace: ...
    @property
    def accesses(self) -> int | None: ...
    @property
    def name(self) -> str: ...
    def addresses(self) -> NDArray[np.uint64]: ...

@final
class Curve:
    @property
    def name(self) -> str: ...
    @property
    def sizes(self) -> NDArray[np.uint64]: ...
    @property
    def misses_per_access(self) -> NDArray[np.float64]: ...
    @property
    def mpki(self) -> NDArray[np.float64] | None: ...
    @property
    def errors(self) -> NDArray[np.float64] | None: ...
    @property
    def accesses(self) -> int: ...
    @property
    def distinct_lines(self) -> int | None: ...
    @property
    def instructions(self) -> int | None: ...
    def plot(self, ax: Any = None) -> Any: ...
    def _repr_svg_(self) -> str: ...

@final
class Profile:
    @staticmethod
    def read(path: str | PathLike[str]) -> Profile: ...
    def write(self, path: str | PathLike[str], *, force: bool = False) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def accesses(self) -> int | None: ...
    @property
    def instructions(self) -> int | None: ...
    @property
    def curve(self) -> Curve | None: ...
    def to_dict(self) -> dict[str, Any]: ...

@final
class Matrix:
    @property
    def names(self) -> list[str]: ...
    @property
    def values(self) -> NDArray[np.float64]: ...
    @property
    def low(self) -> NDArray[np.float64] | None: ...
    @property
    def high(self) -> NDArray[np.float64] | None: ...
    @property
    def unit(self) -> Literal["percent", "weight"]: ...
    @property
    def model(self) -> str: ...
    def plot(self, ax: Any = None) -> Any: ...
    def _repr_svg_(self) -> str: ...

@final
class Plan:
    @property
    def programs(self) -> list[PlacedProgram]: ...
    @property
    def expected(self) -> dict[Literal["plan", "best", "worst", "random"], Outcome]: ...
    @property
    def optimal(self) -> bool: ...
    @property
    def solver(self) -> str: ...
    def to_dict(self) -> dict[str, Any]: ...
    def _repr_html_(self) -> str: ...

@final
class RunLogWindows(Iterator[dict[str, Any]]):
    def __iter__(self) -> RunLogWindows: ...
    def __next__(self) -> dict[str, Any]: ...

@final
class RunLog:
    def __new__(cls, path: str | PathLike[str]) -> RunLog: ...
    @property
    def header(self) -> dict[str, Any]: ...
    def __iter__(self) -> RunLogWindows: ...
    def services(self) -> list[dict[str, Any]]: ...
    def page(self) -> str: ...


def machines() -> list[str]: ...
def models() -> list[str]: ...
def mrc(
    trace: Trace,
    *,
    sizes: Sequence[int] | NDArray[np.integer[Any]] | None = None,
    line_bytes: int = 64,
    sample: float | None = None,
    seed: int = 0,
    threads: int | None = None,
) -> Curve: ...
def profile(trace: Trace, machine: str | None = None, *, name: str | None = None) -> Profile: ...
def predict(
    programs: Sequence[Profile],
    machine: str,
    *,
    model: str = "interval",
) -> Matrix: ...
def plan(
    programs: Sequence[Profile],
    machine: str,
    *,
    model: str = "interval",
    seed: int = 0,
) -> Plan: ...
def record(
    command: Sequence[str],
    output: str | PathLike[str],
    *,
    skip_accesses: int = 0,
    max_accesses: int | None = None,
    kill_at_max: bool = False,
    l1: str = "32K:8",
    follow_children: bool = False,
    force: bool = False,
) -> Trace: ...
def simulate(
    scenario: str | PathLike[str],
    *,
    policy: Callable[[View], Answer | None] | None = None,
    seed: int | None = None,
    log: str | PathLike[str] | None = None,
    force: bool = False,
) -> dict[str, Any]: ...
