"""The shard of a process: it reads and decodes only the columns of its replicas."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProcessShard:
    """Which process this is among those that read a batch together."""

    process: int = 0
    num_processes: int = 1

    def columns(self, num_columns: int) -> slice:
        """Return the columns of a batch that belong to this process."""
        assert num_columns % self.num_processes == 0, (num_columns, self.num_processes)
        each = num_columns // self.num_processes
        return slice(self.process * each, (self.process + 1) * each)

    def rows(self, num_rows: int) -> range:
        """Return this process's rows of a set that all read together: equally many, so the last may exceed it."""
        # Rounded up, since the devices exchange arrays of equal shape.
        each = -(-num_rows // self.num_processes)
        return range(self.process * each, (self.process + 1) * each)


WHOLE = ProcessShard()
