#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Copy recipe.txt to notes.txt.
is notes.txt 'voice horse
wheel' && points=$((points + 3))
is notes.txt 'voice horse
wheel' && is recipe.txt 'voice horse
wheel' && points=$((points + 3))
# Save the last line of report.txt to sketch.txt.
is sketch.txt 'ocean' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
