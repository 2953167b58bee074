"""What is at hand while a drafter's configuration is read."""

from dataclasses import dataclass

from inkrt.engines.dspark.flavours import Layout
from inkrt.engines.dspark.settings import Default, Settings
from inkrt.engines.dspark.weights import DraftTensors
from inkrt.engines.interface import DraftTarget

SHAPES = "from the tensors' shapes"


@dataclass(frozen=True, slots=True)
class Reading:
    """One drafter while it is read; its settings collect the decisions.

    Attributes:
        get: the settings.
        layout: of the checkpoint.
        tensors: of the drafter; none at all if there are no weights.
        has_tensors: whether there are weights.
        target: what the drafter has to fit.
    """

    get: Settings
    layout: Layout
    tensors: DraftTensors
    has_tensors: bool
    target: DraftTarget

    @property
    def is_embedded(self) -> bool:
        """Whether the settings stand in the target's config.json."""
        return self.layout == "embedded"

    def qwen3(self, value: float) -> Default | None:
        """A default of the model class, which only drafters with a folder of their own have."""
        return None if self.is_embedded else Default(value, "the default of qwen3 configurations")

    def rows(self, name: str, share: int = 1) -> int | None:
        """How many times `share` rows a tensor has, if it is there."""
        shape = self.tensors.shapes.get(name)
        return shape[0] // share if shape else None

    def size(self, key: str, stored: int | None) -> int:
        """A size of the layers, else what is `stored`.

        Raises:
            ConfigError: it is invalid, or absent and nothing is stored.
        """
        default = Default(stored, SHAPES) if stored else None
        return self.get.integer(key, needed="it is a size of the drafter's layers", default=default)
