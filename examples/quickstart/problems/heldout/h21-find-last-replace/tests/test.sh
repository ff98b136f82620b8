#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Find the line with onion in agenda.txt for essay.txt.
is essay.txt 'onion dance' && points=$((points + 6))
# Save the last line of poem.txt to paper.txt.
is paper.txt 'robot hotel' && points=$((points + 6))
# Replace salad with actor in chart.txt.
is chart.txt 'actor
tulip
elbow' && points=$((points + 6))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
