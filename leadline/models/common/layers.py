"""Where in a model an error comes from."""

from __future__ import annotations

from leadline.kernels.debug import NonFiniteError


class at_layer:  # used as a context
    """Adds the layer to a ``NonFiniteError`` on its way up."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NonFiniteError):
            raise NonFiniteError(error.op, error.row, self.layer) from error
