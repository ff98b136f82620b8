#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Replace robot with elbow in paper.txt.
is paper.txt 'tulip
elbow
hotel cabin' && points=$((points + 6))
# Copy poem.txt to essay.txt.
is essay.txt 'bacon salad
tulip' && points=$((points + 3))
is essay.txt 'bacon salad
tulip' && is poem.txt 'bacon salad
tulip' && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
