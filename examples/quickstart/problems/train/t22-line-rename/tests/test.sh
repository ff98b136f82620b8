#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Save line 3 of plan.txt to recipe.txt.
is recipe.txt 'ivory mango' && points=$((points + 6))
# Rename notes.txt to quote.txt.
is quote.txt 'zebra horse
bread' && points=$((points + 3))
is quote.txt 'zebra horse
bread' && [ ! -e notes.txt ] && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
