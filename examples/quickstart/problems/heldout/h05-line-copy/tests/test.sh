#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Save line 2 of guide.txt to text.txt.
is text.txt 'actor nurse' && points=$((points + 6))
# Copy agenda.txt to paper.txt.
is paper.txt 'robot
hotel tulip' && points=$((points + 3))
is paper.txt 'robot
hotel tulip' && is agenda.txt 'robot
hotel tulip' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
