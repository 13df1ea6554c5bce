"""What the package shows, and what it needs."""

import subprocess
import sys

import stores


def test_public_names_are_sorted_and_exist() -> None:
    assert stores.__all__ == sorted(stores.__all__)
    assert all(hasattr(stores, name) for name in stores.__all__)


def test_the_package_imports_without_the_servers_packages() -> None:
    program = "import sys; sys.modules['re2'] = sys.modules['s3fs'] = None; import stores"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_the_package_imports_neither_sandboxes_nor_gateway() -> None:
    program = "import stores, sys; sys.exit(bool({'sandboxes', 'gateway', 're2'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True)
