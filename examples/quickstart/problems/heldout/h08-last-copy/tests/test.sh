#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Save the last line of essay.txt to memo.txt.
is memo.txt 'magic' && points=$((points + 6))
# Copy chart.txt to agenda.txt.
is agenda.txt 'bacon
elbow green' && points=$((points + 3))
is agenda.txt 'bacon
elbow green' && is chart.txt 'bacon
elbow green' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
