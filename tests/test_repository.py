"""The repository itself: what is in the wheel, which way imports point, what the packages export."""

import ast
import importlib
import re
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


def test_each_row_of_the_requirements_is_named_by_a_test() -> None:
    """The 32 rows of seed-facts 12."""
    files = [*(ROOT / "tests").rglob("*.py"), ROOT / "sandboxes" / "conformance.py"]
    named = {
        int(number)
        for file in files
        for rows in re.findall(r"seed-facts 12,? rows? (\d+(?:(?:, | and )\d+)*)|12 row (\d+)", file.read_text())
        for number in re.findall(r"\d+", " ".join(rows))
    }
    assert sorted(set(range(1, 33)) - named) == []


def test_client_imports_without_the_server() -> None:
    """The base install has no FastAPI, no jsonschema, no pydantic-settings."""
    script = (
        "import sys; import gateway.client, gateway.filesystem, gateway.models; "
        "print([name for name in ('fastapi', 'jsonschema', 'pydantic_settings', 'uvicorn', 're2') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


ENGINE_CALLS = {
    "build": "",  # from the gateway's machine, not by the gateway
    "containers": "GET /containers/json",
    "create_container_from_config": "POST /containers/create",
    "create_network": "POST /networks/create",
    "exec_create": "POST /containers/sandgate-i-s/exec",
    "info": "GET /info",
    "inspect_container": "GET /containers/sandgate-i-s/json",
    "inspect_image": "GET /images/registry.example:5000/sandgate/sandbox:1/json",
    "inspect_volume": "GET /volumes/sandgate-i-s-home",
    "networks": "GET /networks",
    "remove_container": "DELETE /containers/sandgate-i-s",
    "remove_network": "DELETE /networks/sandgate-i-s",
    "remove_volume": "DELETE /volumes/sandgate-i-s-home",
    "rename": "POST /containers/sandgate-i-s/rename",
    "start": "POST /containers/sandgate-i-s/start",
    "stats": "GET /containers/sandgate-i-s/stats",
    "volumes": "GET /volumes",
    "wait": "POST /containers/sandgate-i-s/wait",
}


def test_the_socket_proxy_lets_through_what_the_gateway_asks() -> None:
    """A new call in `sandboxes/docker.py` needs its place here, and in haproxy.cfg."""
    used = set(re.findall(r"\bapi\.(\w+)\(", (ROOT / "sandboxes/docker.py").read_text()))
    assert used == set(ENGINE_CALLS)
    config = (ROOT / "docker/haproxy.cfg").read_text()
    methods = dict(re.findall(r"acl (\w+) method (\w+)", config))
    paths = dict(re.findall(r"acl (\w+) path_reg (\S+)", config))
    [allowed] = re.findall(r"http-request allow if (.*)", config)
    rules = [(methods[group.split()[0]], paths[group.split()[1]]) for group in allowed.split(" || ")]
    for call in (*filter(None, ENGINE_CALLS.values()), "POST /exec/0a1b/start"):
        method, path = call.split()
        assert any(method == one and re.search(pattern, f"/v1.41{path}") for one, pattern in rules), call
