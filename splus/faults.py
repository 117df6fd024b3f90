"""What goes wrong now and then in training: said once, and an error when it does not stop."""

import warnings
from collections.abc import Hashable


class Faults:
    """Counts consecutive faults by key: the first one warns, number ``limit`` raises."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._consecutive: dict[Hashable, int] = {}
        self._said: set[Hashable] = set()

    def report(self, key: Hashable, name: str, what: str, advice: str) -> None:
        """Count a fault of ``key``, which messages call ``name``.

        Raises:
            RuntimeError: it is fault number ``limit`` in a row.
        """
        self._consecutive[key] = self._consecutive.get(key, 0) + 1
        if self._consecutive[key] >= self.limit:
            raise RuntimeError(f"{what} of {name}, {self._consecutive[key]} times in a row. {advice}")
        if key not in self._said:
            self._said.add(key)
            warnings.warn(
                f"{what} of {name}. This is said once; {self.limit} times in a row is an error.", stacklevel=2
            )

    def clear(self, key: Hashable) -> None:
        """All is well again with ``key``."""
        self._consecutive.pop(key, None)
