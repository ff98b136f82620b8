#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Find the line with tiger in items.txt for notes.txt.
is notes.txt 'tiger sugar' && points=$((points + 6))
# Let a sub-agent do this: Append apple to plan.txt.
[ "$(tail -n 1 plan.txt 2> /dev/null)" = apple ] && points=$((points + 3))
is plan.txt 'beach
dream
apple' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
