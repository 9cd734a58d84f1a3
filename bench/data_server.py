"""Data server: a store of some latency and bandwidth, served from a folder by HTTP.

    python -m bench.data_server FOLDER --latency 0.03 --rate 1e8

It prints its port.  GET and HEAD of /PATH, with a Range or without; GET /?list is all paths with
their sizes.  Each answer begins after the latency; the bytes of all go over one link, one answer
after the other.  It is as much of S3 as a client needs that reads.
"""

import argparse
import asyncio
import json
import re
from pathlib import Path


class Link:
    """A link that all answers share."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.free_s = bytes_per_s, 0.0

    async def carry(self, size: int) -> None:
        """Return once so many bytes are over."""
        now_s = asyncio.get_running_loop().time()
        self.free_s = max(self.free_s, now_s) + size / self.bytes_per_s
        await asyncio.sleep(self.free_s - now_s)


class Server:
    """Answers requests."""

    def __init__(self, folder: Path, latency_s: float, link: Link) -> None:
        self.folder, self.latency_s, self.link = folder, latency_s, link

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                verb, path, _ = head.split("\r\n", 1)[0].split()
                status, content, size = self.found(path, head)
                await asyncio.sleep(self.latency_s)
                lines = f'HTTP/1.1 {status}\r\nContent-Length: {size}\r\nETag: "{size}"\r\n'
                lines += "Last-Modified: Fri, 27 Nov 2026 10:00:00 GMT\r\n\r\n"
                if verb == "HEAD":
                    content = b""
                await self.link.carry(len(content))
                writer.write(lines.encode() + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def found(self, path: str, head: str) -> tuple[str, bytes, int]:
        """Return the status, the bytes, and how many there are."""
        if path == "/?list":
            files = [file for file in self.folder.rglob("*") if file.is_file()]
            sizes = {str(file.relative_to(self.folder)): file.stat().st_size for file in files}
            content = json.dumps(sizes).encode()
            return "200 OK", content, len(content)
        file = self.folder / path.lstrip("/").partition("?")[0]
        if not file.is_file():
            return "404 Not Found", b"", 0
        content = file.read_bytes()
        if told := re.search(r"(?i)^range: bytes=(\d+)-(\d*)\r?$", head, re.M):
            begin, end = int(told[1]), int(told[2] or len(content) - 1)
            total, content = len(content), content[begin : end + 1]
            span = f"Content-Range: bytes {begin}-{begin + len(content) - 1}/{total}"
            return f"206 Partial Content\r\n{span}", content, len(content)
        return "200 OK", content, len(content)


async def serve(folder: Path, latency_s: float, bytes_per_s: float) -> None:
    """Serve until the process is ended."""
    server = Server(folder, latency_s, Link(bytes_per_s))
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


def main() -> None:
    """Serve what the command says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--rate", type=float, default=1e8)
    asked = parser.parse_args()
    asyncio.run(serve(asked.folder, asked.latency, asked.rate))


if __name__ == "__main__":
    main()
