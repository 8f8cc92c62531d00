"""What is installed, imported and promised: the dependencies, the import direction, the commands of the README."""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("models", "parallelize", "titanlike")
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())

# Which of our packages each may import. `scripts` and `benchmarks` may import all of them.
MAY_IMPORT = {"models": {"models"}, "parallelize": {"models", "parallelize"}, "titanlike": set(PACKAGES)}

# Named in pyproject.toml, slow to import, and needed by some runs only: a function imports them when it uses them.
IMPORTED_LATE = ("datasets", "tensorboard", "torch.utils.tensorboard")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute module names that the code imports at any depth, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield node.module or "", node.lineno


def imports_of(path: Path) -> list[tuple[str, int]]:
    return list(imports(ast.parse(path.read_text(), str(path))))


def modules() -> list[str]:
    names = []
    for path in sources(*PACKAGES):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def requirement_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement)[0].replace("-", "_").lower()


REQUIRED = {requirement_name(requirement) for requirement in PROJECT["project"]["dependencies"]}

# Parts of a required dependency that have a package of their own, of which it demands one exact version.
PARTS = {"pydantic_core"}


def refused_modules() -> list[str]:
    """Top-level modules of the installed packages that no required dependency brings along."""
    brought: set[str] = set()
    pending = set(REQUIRED)
    while pending:
        name = pending.pop()
        brought.add(name)
        try:
            requirements = map(Requirement, importlib.metadata.requires(name) or [])
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system, or optional
        for requirement in requirements:
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending |= {requirement_name(requirement.name)} - brought
    owners = importlib.metadata.packages_distributions()
    ours = {"titanlike", *PACKAGES}
    return sorted(
        module
        for module, packages in owners.items()
        if module not in ours and not {requirement_name(package) for package in packages} & brought
    )


# --- imports ---


def test_every_import_of_the_packages_is_in_the_standard_library_or_a_named_dependency() -> None:
    """Symptom: it works here, because something else has brought the package."""
    allowed = set(sys.stdlib_module_names) | set(PACKAGES) | REQUIRED | PARTS
    optional = {
        requirement_name(requirement)
        for name, extra in PROJECT["project"]["optional-dependencies"].items()
        if name not in ("dev", "test")
        for requirement in extra
    }
    for path in sources(*PACKAGES, "scripts"):
        for name, line in imports_of(path):
            assert name.split(".")[0] in allowed | optional, f"{path.relative_to(ROOT)}:{line} imports {name}"


def test_standard_library_modules_newer_than_the_oldest_python_are_not_imported() -> None:
    """Symptom: `import tomllib` works on the author's Python 3.11 and not on 3.10."""
    for path in sources(*PACKAGES, "scripts", "tests", "benchmarks"):
        for name, line in imports_of(path):
            assert name.split(".")[0] != "tomllib", f"{path.relative_to(ROOT)}:{line} imports {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    """scripts -> titanlike -> parallelize -> models"""
    for path in sources(package):
        for name, line in imports_of(path):
            top = name.split(".")[0]
            place = f"{path.relative_to(ROOT)}:{line} imports {name}"
            assert top not in ("scripts", "tests", "benchmarks"), place
            assert top not in PACKAGES or top in MAY_IMPORT[package], place


def test_models_import_torch_alone_and_know_nothing_of_distribution() -> None:
    for path in sources("models"):
        for name, line in imports_of(path):
            place = f"{path.relative_to(ROOT)}:{line} imports {name}"
            assert name.split(".")[0] in {"torch", "models"} | set(sys.stdlib_module_names), place
            assert not name.startswith("torch.distributed"), place


def test_packages_import_with_the_required_dependencies_alone() -> None:
    """Symptom (NT #112): an optional kernel library is demanded at import."""
    refused = refused_modules()
    assert "pytest" in refused
    script = f"""
import importlib, sys

class OnlyRequired:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused or name in late:
            raise ImportError(f"not installed: {{name}}")

refused, late = set({refused!r}), set({IMPORTED_LATE!r})
sys.meta_path.insert(0, OnlyRequired())
for name in {modules()!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_importing_a_package_is_cheap() -> None:
    """Symptom: `--help` or a config error takes seconds, since the package imports torch and more at its top."""
    script = (
        f"import sys, {', '.join(PACKAGES)}; sys.exit(', '.join(sorted({{'torch', 'datasets'}} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd="/")
    assert not done.stderr.strip(), f"imported: {done.stderr}"


# --- what is declared ---


def test_dependencies_are_sorted_and_ask_for_the_python_and_torch_that_are_promised() -> None:
    dependencies = PROJECT["project"]["dependencies"]
    assert dependencies == sorted(dependencies)
    assert PROJECT["project"]["requires-python"] == ">=3.10"
    assert "torch>=2.11" in dependencies


def test_each_folder_of_modules_is_a_package() -> None:
    """Symptom: works in the clone and is missing from the installed package; a test function no rank can import."""
    for path in sources(*PACKAGES, "tests"):
        assert (path.parent / "__init__.py").exists(), f"{path.parent.relative_to(ROOT)} has no __init__.py"


def test_each_data_file_of_a_package_is_installed_with_it() -> None:
    """Symptom: works in the clone; the installed package has the code and not the page that it fills in."""
    declared = PROJECT["tool"]["setuptools"]["package-data"]
    for package in PACKAGES:
        folder = ROOT / package
        installed = {path for pattern in declared.get(package, []) for path in folder.glob(pattern)}
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert path in installed, path.relative_to(ROOT)


# --- the README and the Makefile ---


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def readme_commands() -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip().startswith(("make", ".venv/bin/", "torchrun", "python"))]


def test_the_makefile_has_the_promised_targets() -> None:
    assert {"train", "test", "test-all", "check", "clean"} <= make_targets()


def test_the_readme_commands_are_those_of_the_makefile_and_name_files_that_exist() -> None:
    """Symptom (NT #362): the README's quick start does not run."""
    commands = readme_commands()
    assert "make train" in commands
    assert "make test" in commands
    for command in commands:
        words = command.split()
        if words[0] == "make":
            assert set(word for word in words[1:] if "=" not in word) <= make_targets(), command
        for word in words:
            if word.startswith(("scripts/", "configs/", "benchmarks/", "docs/")):
                assert (ROOT / word).exists(), f"{command}: no {word}"


def test_the_makefile_names_scripts_and_configs_that_exist() -> None:
    for word in re.findall(r"\b(?:scripts|configs|benchmarks)/[\w./-]+", (ROOT / "Makefile").read_text()):
        assert (ROOT / word.rstrip(".")).exists(), word


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.relative_to(ROOT)}: {target}"


def test_a_document_with_bare_commands_says_where_they_are_found() -> None:
    """Symptom: after `make train`, as the README says, `torchrun` and `python` of docs/ are other ones, or none."""
    for document in (ROOT / "docs").glob("*.md"):
        text = document.read_text()
        if re.search(r"^ *(python|torchrun) ", text, re.MULTILINE):
            assert "environment active: `source .venv/bin/activate`" in text, document.name


# --- the tree ---


def tracked_texts() -> Iterator[tuple[Path, str]]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not in a git clone")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            try:
                yield path.relative_to(ROOT), path.read_text()
            except UnicodeDecodeError:
                continue  # a picture or other binary


def test_no_source_file_is_longer_than_six_hundred_lines() -> None:
    for path in sources(*PACKAGES, "scripts", "tests", "benchmarks"):
        length = len(path.read_text().splitlines())
        assert length <= 600, f"{path.relative_to(ROOT)} has {length} lines"


def test_nothing_in_the_tree_names_one_machine_or_a_package_registry() -> None:
    """Symptom: a script that runs on its author's machine only."""
    # Put together here, so that this file does not name them either.
    homes = "|".join(("home/[a-z]", "root/", "Users/[A-Za-z]", "work/", "mnt/[a-z]"))
    hosts = "|".join(("pypi" + r"\.", "files.python" + "hosted", "download.pytorch" + r"\.", "deb.debian" + r"\."))
    for path, text in tracked_texts():
        for number, line in enumerate(text.splitlines(), 1):
            assert not re.search(rf"(?<![\w.~$}}/-])/(?:{homes})", line), f"{path}:{number}: {line.strip()}"
            assert not re.search(hosts, line), f"{path}:{number}: {line.strip()}"


def test_test_files_are_named_so_that_pytest_finds_them() -> None:
    for path in sources("tests"):
        has_tests = any(
            isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            for node in ast.parse(path.read_text()).body
        )
        assert not has_tests or path.name.startswith("test_"), path.relative_to(ROOT)


@pytest.mark.parametrize("name", ["step", "mesh", "zero", "memory", "network", "generate"])
def test_a_benchmark_answers_an_unknown_preset_with_those_that_there_are(name: str) -> None:
    """Symptom: a traceback through the config, of each contender."""
    source = (ROOT / "benchmarks" / f"{name}.py").read_text()
    assert "add_preset(parser)" in source or '"--preset", default="26m", choices=list(PRESETS)' in source


def test_an_unknown_preset_of_a_benchmark_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from contenders import add_preset
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    parser = argparse.ArgumentParser()
    add_preset(parser)
    assert parser.parse_args([]).preset == "26m"
    with pytest.raises(SystemExit):
        parser.parse_args(["--preset", "8z"])
    assert "argument --preset: invalid choice: '8z' (choose from" in capsys.readouterr().err
