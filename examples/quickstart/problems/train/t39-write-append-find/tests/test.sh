#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Write metal to report.txt.
is report.txt 'metal' && points=$((points + 6))
# Append apple to sketch.txt.
[ "$(tail -n 1 sketch.txt 2> /dev/null)" = apple ] && points=$((points + 3))
is sketch.txt 'paint
lemon honey
apple' && points=$((points + 3))
# Find the line with north in letter.txt for score.txt.
is score.txt 'north yacht' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
