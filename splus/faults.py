"""What goes wrong now and then in training: said once, and an error when it does not stop."""

import warnings


class Faults:
    """Counts the consecutive faults of each parameter: the first one warns, number ``limit`` raises."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._consecutive: dict[str, int] = {}
        self._said: set[str] = set()

    def report(self, name: str, what: str, advice: str) -> None:
        """Count a fault of the parameter ``name``.

        Raises:
            RuntimeError: it is fault number ``limit`` in a row.
        """
        self._consecutive[name] = self._consecutive.get(name, 0) + 1
        if self._consecutive[name] >= self.limit:
            raise RuntimeError(f"{what} of {name}, {self._consecutive[name]} times in a row. {advice}")
        if name not in self._said:
            self._said.add(name)
            warnings.warn(
                f"{what} of {name}. This is said once; {self.limit} times in a row is an error.", stacklevel=2
            )

    def clear(self, name: str) -> None:
        """The parameter ``name`` is well again."""
        self._consecutive.pop(name, None)
