#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Sort poem.txt into chart.txt.
is chart.txt 'elbow cabin
green
magic piano' && points=$((points + 6))
# Delete text.txt.
[ ! -e text.txt ] && is agenda.txt 'salad' && points=$((points + 6))
# Save line 2 of paper.txt to guide.txt.
is guide.txt 'tulip' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
