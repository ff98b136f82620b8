#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Replace beach with flame in sketch.txt.
is sketch.txt 'flame
queen
night' && points=$((points + 6))
# Count the lines of list.txt into notes.txt.
is notes.txt '6' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
