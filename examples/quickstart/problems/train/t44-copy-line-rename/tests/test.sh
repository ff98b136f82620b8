#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Copy menu.txt to list.txt.
is list.txt 'ivory metal
zebra candy' && points=$((points + 3))
is list.txt 'ivory metal
zebra candy' && is menu.txt 'ivory metal
zebra candy' && points=$((points + 3))
# Save line 3 of quote.txt to index.txt.
is index.txt 'earth' && points=$((points + 6))
# Rename notes.txt to sketch.txt.
is sketch.txt 'knife
apple' && points=$((points + 3))
is sketch.txt 'knife
apple' && [ ! -e notes.txt ] && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
