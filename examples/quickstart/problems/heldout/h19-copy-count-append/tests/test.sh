#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Copy essay.txt to agenda.txt.
is agenda.txt 'robot
cabin' && points=$((points + 3))
is agenda.txt 'robot
cabin' && is essay.txt 'robot
cabin' && points=$((points + 3))
# Count the lines of paper.txt into chart.txt.
is chart.txt '6' && points=$((points + 6))
# Append robot to poem.txt.
[ "$(tail -n 1 poem.txt 2> /dev/null)" = robot ] && points=$((points + 3))
is poem.txt 'tulip dance
piano magic
robot' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
