"""Parameter counts by component."""

from __future__ import annotations

from msgspec import Struct
from pydantic import ConfigDict

from moesim.hwmodels.frozen import Frozen


class Parameters(Struct, frozen=True):
    """Parameter counts by component; `+` adds two of them and `*` multiplies one by a number."""

    embedding: int = 0
    head: int = 0
    attention: int = 0
    dense_ffn: int = 0
    routed_experts: int = 0
    shared_experts: int = 0
    router: int = 0
    norms: int = 0
    mtp_projection: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        """Add component by component."""
        return Parameters(*(getattr(self, f) + getattr(other, f) for f in self.__struct_fields__))

    def __mul__(self, times: int) -> Parameters:
        """Multiply every component by `times`."""
        return Parameters(*(getattr(self, f) * times for f in self.__struct_fields__))

    @property
    def total(self) -> int:
        """Parameters of all components together."""
        return sum(getattr(self, f) for f in self.__struct_fields__)

    @property
    def in_counted_gemms(self) -> int:
        """Weights of the GEMMs that published FLOP counts include, without embedding, router and norms."""
        return self.total - self.embedding - self.router - self.norms

    def as_dict(self) -> dict[str, int]:
        """Counts by component name."""
        return {f: getattr(self, f) for f in self.__struct_fields__}


class ModelPart(Frozen):
    """A frozen description with strict types: the text "8", for example, is not accepted as an integer."""

    model_config = ConfigDict(strict=True)
