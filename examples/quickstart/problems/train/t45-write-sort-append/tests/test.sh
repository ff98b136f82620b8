#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Write chair to letter.txt.
is letter.txt 'chair' && points=$((points + 6))
# Sort list.txt into sketch.txt.
is sketch.txt 'ivory
light
zebra' && points=$((points + 6))
# Append flame to plan.txt.
[ "$(tail -n 1 plan.txt 2> /dev/null)" = flame ] && points=$((points + 3))
is plan.txt 'koala juice
radio honey
flame' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
