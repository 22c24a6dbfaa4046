"""`python -m book serve`: the built pages on this machine's own address, for nobody else."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from book.bootstrap import ROOT


class Handler(SimpleHTTPRequestHandler):
    """Static files, without a line per request and without stale copies in the browser."""

    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript"}  # noqa: RUF012

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    allow_reuse_address = sys.platform != "win32"  # there it would share a port in use
    daemon_threads = True


def start(folder: Path, port: int) -> Server:
    """A server bound to 127.0.0.1, not yet answering; port 0 takes a free one."""
    return Server(("127.0.0.1", port), partial(Handler, directory=str(folder)))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m book serve", description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "html")
    options = parser.parse_args(arguments)
    if not (options.folder / "index.html").is_file():
        print(f"{options.folder} has no pages: run `python -m book build` first", file=sys.stderr)
        return 1
    try:
        server = start(options.folder, options.port)
    except (OSError, OverflowError) as error:
        print(
            f"port {options.port} cannot be used ({error}): another program has it? "
            f"Choose one: python -m book serve --port {options.port % 60000 + 1}",
            file=sys.stderr,
        )
        return 1
    print(f"The book is at http://127.0.0.1:{server.server_port}/   (stop with Ctrl-C)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
