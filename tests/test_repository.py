"""The repository itself: what is in the wheel, which way imports point, what the packages export."""

import ast
import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("gateway", "sandboxes", "stores")


def test_wheel_holds_exactly_the_three_packages(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("sandgate-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    for link in (ROOT / "gateway/cli/context").iterdir():  # what images are built from
        assert zipfile.ZipFile(wheel).read(f"gateway/cli/context/{link.name}") == link.read_bytes()
    assert zipfile.ZipFile(wheel).read("sandboxes/seccomp.json") == (ROOT / "docker/seccomp.json").read_bytes()
    assert any(name.startswith("gateway/migrations/") and name.endswith(".sql") for name in names)


def test_imports_point_one_way() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_exported_names_are_sorted_and_exist(package: str) -> None:
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(module.__all__, key=_constants_classes_functions)
    assert all(hasattr(module, name) for name in module.__all__)


def _constants_classes_functions(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_no_python_below_docker() -> None:
    """A module there would hide `import docker`."""
    assert list((ROOT / "docker").rglob("*.py")) == []


def test_only_package_roots_declare_all() -> None:
    declaring = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "__all__"
        in {
            target.id
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
    ]
    assert declaring == [f"{package}/__init__.py" for package in PACKAGES]


def test_client_imports_without_the_server() -> None:
    """The base install has no FastAPI, no jsonschema, no pydantic-settings."""
    script = (
        "import sys; import gateway.client, gateway.filesystem, gateway.models; "
        "print([name for name in ('fastapi', 'jsonschema', 'pydantic_settings', 'uvicorn', 're2') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
