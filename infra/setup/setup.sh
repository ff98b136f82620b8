#!/usr/bin/env bash
# Finds a Python that can build Gyre's environments and hands over to install.py.
#   infra/setup/setup.sh [all | venv | engine]
# GYRE_PYTHON=/path/to/python chooses the interpreter. Nothing is printed when everything is up to date.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

without_venv=""
for candidate in ${GYRE_PYTHON:-python3.11 python3.12 python3 python3.13}; do
  # A command that exists may still not run (pyenv shims), be too old, or lack the venv module (Debian splits it off).
  "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue
  if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    exec "$candidate" -E -s "$here/install.py" "$@"
  fi
  without_venv="${without_venv:-$candidate}"
done

{
  if [ -n "$without_venv" ]; then
    version="$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    echo "error: $without_venv (Python $version) cannot make virtual environments: its venv module is missing."
    echo "       Debian/Ubuntu: sudo apt-get install -y python$version-venv"
  else
    echo "error: Gyre needs Python 3.11 or later; tried: ${GYRE_PYTHON:-python3.11 python3.12 python3 python3.13}."
    echo "       Debian/Ubuntu: sudo apt-get install -y python3.11 python3.11-venv"
    echo "       or name an interpreter: GYRE_PYTHON=/path/to/python3.11 make install"
  fi
} >&2
exit 1
