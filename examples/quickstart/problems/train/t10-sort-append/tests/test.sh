#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Sort plan.txt into score.txt.
is score.txt 'north
paint
urban' && points=$((points + 6))
# Append stone to quote.txt.
[ "$(tail -n 1 quote.txt 2> /dev/null)" = stone ] && points=$((points + 3))
is quote.txt 'metal beach
chair
stone' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
