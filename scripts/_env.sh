# Sourced by the scripts: checks what the machine has, makes .venv, installs the project when it changed.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PY="$VENV/bin/python"
cd "$ROOT" || exit 1

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

hint() { # hint DEBIAN-PACKAGE BREW-FORMULA
    local sudo="sudo "
    [ "$EUID" -ne 0 ] || sudo=""
    if [ "$(uname -s)" = Darwin ]; then echo "brew install $2"; else echo "${sudo}apt-get install $1"; fi
}

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null &&
            "$name" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    if command -v python3 >/dev/null; then
        die "Python 3.11 or newer is needed, python3 is $(python3 -V 2>&1): $(hint python3 python@3.13)"
    fi
    die "Python 3.11 or newer is needed and there is no python3: $(hint python3 python@3.13)"
}

check_machine() {
    local python="$1"
    case "$(uname -s)" in
    Darwin) [ "$(uname -m)" = arm64 ] || die "on macOS an Apple Silicon machine is needed, this is $(uname -m)" ;;
    Linux) command -v g++ >/dev/null || die "a C++ compiler is needed and there is no g++: $(hint g++ '')" ;;
    *) die "this runs on macOS and Linux, not on $(uname -s)" ;;
    esac
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "Python's venv module is missing: $(hint python3-venv python@3.13)"
}

# Everything that an installation depends on: an edited Python file needs none, a new one does.
fingerprint() {
    "$PY" - "$ROOT" <<'PYTHON'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(sys.version.encode())
native = {".cpp", ".cc", ".c", ".h", ".hpp"}
for path in sorted(path for top in ("mlxserve", "kernels_metal", "convert") for path in (root / top).rglob("*")):
    if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".pyc", ".so"}:
        digest.update(str(path.relative_to(root)).encode())
        if path.suffix in native or path.name == "CMakeLists.txt":
            digest.update(path.read_bytes())
for name in ("pyproject.toml", "CMakeLists.txt"):
    if (root / name).is_file():
        digest.update((root / name).read_bytes())
print(digest.hexdigest())
PYTHON
}

# requirements EXTRA: what pyproject.toml lists for it, one a line; extras of ours in it are spelt out, as no index
# has this project.
requirements() {
    "$PY" - "$ROOT/pyproject.toml" "$1" <<'PYTHON'
import sys, tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]


def listed(extra):
    for line in project["optional-dependencies"][extra]:
        own = line.removeprefix(project["name"] + "[")
        yield from listed(own.removesuffix("]")) if own != line else [line]


print("\n".join(listed(sys.argv[2])))
PYTHON
}

# install EXTRA: make .venv hold the project and this extra ("" for none); nothing to do when it does.
install() {
    local extra="$1" python line want wanted_extra="" wants=()
    local stamp="$VENV/.mlxserve-installed" extra_stamp="$VENV/.mlxserve-extra-$1"
    # A venv holds absolute paths: one that was moved with its checkout is made anew.
    if [ "$(cat "$VENV/.mlxserve-root" 2>/dev/null)" != "$ROOT" ] || ! "$PY" -c '' 2>/dev/null; then
        python="$(find_python)" || exit 1
        check_machine "$python"
        say "Making .venv with $("$python" -V)"
        rm -rf "$VENV"
        "$python" -m venv "$VENV" || die "python -m venv failed"
        printf '%s\n' "$ROOT" >"$VENV/.mlxserve-root"
    fi
    want="$(fingerprint)" || die "cannot read the sources"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
        check_machine "$PY"
        wants+=(--editable "$ROOT")
    fi
    if [ -n "$extra" ]; then
        wanted_extra="$(requirements "$extra")" || die "cannot read pyproject.toml"
        if [ "$(cat "$extra_stamp" 2>/dev/null)" != "$wanted_extra" ]; then
            while IFS= read -r line; do wants+=("$line"); done <<<"$wanted_extra"
        fi
    fi
    if [ ${#wants[@]} -eq 0 ]; then return; fi
    say "Installing mlxserve${extra:+ and its $extra tools} into .venv (a few minutes the first time)"
    rm -f "$stamp"
    "$PY" -m pip install --quiet --disable-pip-version-check "${wants[@]}" </dev/null >&2 ||
        die "the installation failed; the lines above say why"
    printf '%s\n' "$want" >"$stamp"
    if [ -n "$extra" ]; then printf '%s\n' "$wanted_extra" >"$extra_stamp"; fi
}
