"""Bounded output: what a stream began with and what it ended with."""


class Capture:
    """A sink that keeps the first and the last half of `max_bytes` and counts everything.

    Memory stays below about twice `max_bytes` and two chunks, whatever passes.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError("max_bytes must not be negative")
        self.max_bytes = max_bytes
        self.total = 0
        self._head_bytes = max_bytes - max_bytes // 2
        self._tail_bytes = max_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()

    async def write(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if chunk and self._tail_bytes:
            self._tail += chunk[-self._tail_bytes :]
            if len(self._tail) > 2 * self._tail_bytes:  # cut now and then, so that each byte is moved once at most
                del self._tail[: -self._tail_bytes]

    @property
    def head(self) -> bytes:
        """The first bytes: all of them unless `truncated`."""
        return bytes(self._head)

    @property
    def tail(self) -> bytes:
        """The last bytes that are not in `head`."""
        return bytes(self._tail[-self._tail_bytes :]) if self._tail_bytes else b""

    @property
    def truncated(self) -> bool:
        """Whether bytes are missing between `head` and `tail`."""
        return self.total > self.max_bytes

    def text(self) -> str:
        """Return the kept bytes as text, bytes that are not UTF-8 replaced.

        Where something is missing, a line says how much; a character that the cut went through is left out.
        """
        if not self.truncated:
            return (self.head + self.tail).decode(errors="replace")
        head, tail = _without_cut_end(self.head), _without_cut_start(self.tail)
        missing = self.total - len(head) - len(tail)
        return f"{head.decode(errors='replace')}\n[... {missing:,} bytes left out ...]\n{tail.decode(errors='replace')}"


def _without_cut_end(data: bytes) -> bytes:
    """Drop the first bytes of a character whose rest is missing."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return data[:-back] if length > back else data
    return data


def _without_cut_start(data: bytes) -> bytes:
    """Drop the last bytes of a character whose start is missing."""
    cut = 0
    while cut < min(3, len(data)) and data[cut] & 0xC0 == 0x80:
        cut += 1
    return data[cut:]
