"""An engine of a test's own, which it may stop, kill and fill."""

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from sandboxes.container import BASE_IMAGE

START_SECONDS = 60.0


class PrivateEngine:
    """A dockerd with everything in one folder, and the base image of sandboxes, which has no Python."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sandgate-engine-"))  # short: a socket's path has at most 107 bytes
        self.url = f"unix://{self.folder}/engine.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        with subprocess.Popen(["docker", "save", BASE_IMAGE], stdout=subprocess.PIPE) as saved:
            subprocess.run(["docker", "-H", self.url, "load"], stdin=saved.stdout, check=True, capture_output=True)

    def start(self) -> None:
        """Start it where it is not running, and wait until it answers; it can fail while its killed life still ends."""
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
            if self._process is None or self._process.poll() is not None:
                self._process = self._started()
            time.sleep(0.1)

    def _started(self) -> subprocess.Popen[bytes]:
        place = self.folder
        with (place / "log").open("ab") as log:
            return subprocess.Popen(
                [
                    *("unshare", "--net"),  # without a bridge it would remove the bridge of the machine's own engine
                    *("dockerd", "-H", self.url, "--data-root", place / "data", "--exec-root", place / "exec"),
                    *("--pidfile", place / "pid", "--bridge=none", "--iptables=false", "--ip-masq=false"),
                ],
                stdout=log,
                stderr=log,
            )

    def _answers(self) -> bool:
        if not (self.folder / "engine.sock").exists():
            return False
        asked = subprocess.run(["docker", "-H", self.url, "version"], capture_output=True, check=False, timeout=30)
        return asked.returncode == 0

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def left(self) -> list[str]:
        listed = subprocess.run(["docker", "-H", self.url, "ps", "-aq"], capture_output=True, text=True, check=True)
        return listed.stdout.split()

    def close(self) -> None:
        self.send(signal.SIGCONT)
        self.start()
        for container in self.left():
            subprocess.run(["docker", "-H", self.url, "rm", "-f", container], capture_output=True, check=False)
        self.send(signal.SIGTERM)
        assert self._process is not None
        self._process.wait(30)
        for line in Path("/proc/self/mounts").read_text().splitlines()[::-1]:  # a killed engine leaves its mounts
            if line.split()[1].startswith(f"{self.folder}/"):
                subprocess.run(["umount", "--lazy", line.split()[1]], check=False)
        shutil.rmtree(self.folder)
