#!/usr/bin/env bash
# The step of action.yml: install brim, audit, annotate the pull request, write SARIF. The inputs come in INPUT_* variables, so it
# runs anywhere: INPUT_INSTALL=none bash .github/actions/doctor/run.sh
set -euo pipefail

install=${INPUT_INSTALL:-}
sarif=${INPUT_SARIF_FILE:-brim.sarif}
read -r -a targets <<< "${INPUT_TARGETS:-.}"
read -r -a options <<< "${INPUT_ARGUMENTS:-}"
if [[ -n ${INPUT_FAIL_ON:-} ]]; then
  options+=(--fail-on "$INPUT_FAIL_ON")
fi

if [[ $install != none ]]; then
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
  environment=${RUNNER_TEMP:-$(mktemp -d)}/brim-doctor
  python3 -m venv "$environment"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "${install:-$root}"
  PATH=$environment/bin:$PATH
fi

if [[ -n ${GITHUB_OUTPUT:-} ]]; then
  echo "sarif-file=$sarif" >> "$GITHUB_OUTPUT"
fi
exec brim doctor "${targets[@]}" --format github --output "$sarif" ${options[@]+"${options[@]}"}
