#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Sort guide.txt into agenda.txt.
is agenda.txt 'bacon
fruit
nurse tulip' && points=$((points + 6))
# Save line 2 of text.txt to paper.txt.
is paper.txt 'hotel' && points=$((points + 6))
# Count the lines of chart.txt into essay.txt.
is essay.txt '5' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
