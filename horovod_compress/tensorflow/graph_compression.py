"""A compression that users of TensorFlow hold."""

from ..session.bound import Bound
from .graph import Graph


class GraphCompression(Bound):
    """A compression whose payloads are moved by operations of graphs."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.session)
        self._graph = graph
        # Horovod's Compressor interface.
        self.compress, self.decompress = graph.compress, graph.decompress

    def __repr__(self) -> str:
        return f"<{self._session.compressor!r} of {len(self._graph.variables)} variables>"

    @property
    def is_first(self) -> bool:
        """True if this is the first rank of those that compress."""
        process_set = self._graph.ranks.process_set
        return bool(process_set.included()) and process_set.rank() == 0
