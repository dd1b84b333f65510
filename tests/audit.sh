#!/usr/bin/env bash
# Known vulnerabilities of all that is installed: fails if there is one, says in a line why it cannot look.
set -euo pipefail
service="${ADVISORIES:-https://pypi.org/pypi}" # also a registry's mirror may lack this part of it
if ! reason="$(python - "$service" 2>&1 << 'PYTHON'
import importlib.util
import json
import sys
import urllib.request

try:
    with urllib.request.urlopen(f"{sys.argv[1]}/pip/25.0/json", timeout=10) as answer:
        json.load(answer)["vulnerabilities"]
except (OSError, ValueError, KeyError) as error:
    sys.exit(f"{sys.argv[1]} gives no advisories ({type(error).__name__}: {error})")
if importlib.util.find_spec("pip_audit") is None:
    sys.exit("pip-audit is not installed")
PYTHON
)"; then
    echo "dependency audit skipped: $reason"
    exit 0
fi
python -m pip_audit --local --skip-editable --progress-spinner off --timeout 15
