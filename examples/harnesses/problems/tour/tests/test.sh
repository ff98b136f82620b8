#!/bin/sh
# Judges the workspace: the share of the files that the harness's tools had to write.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }
is notes.txt 'first line' && points=$((points + 1))
is one.txt 'one' && points=$((points + 1))
is two.txt 'two' && points=$((points + 1))
is sub.txt 'sub' && points=$((points + 1))
mkdir -p "${REWARD_DIR:-/logs/verifier}"
echo "0.$((points * 25))" | sed 's/^0\.100$/1/' > "${REWARD_DIR:-/logs/verifier}/reward.txt"
