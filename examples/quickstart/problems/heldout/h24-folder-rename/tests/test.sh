#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Make the folder safe.
[ -d safe ] && points=$((points + 6))
# Move essay.txt into safe.
is safe/essay.txt 'cabin' && points=$((points + 3))
is safe/essay.txt 'cabin' && [ ! -e essay.txt ] && points=$((points + 3))
# Rename poem.txt to paper.txt.
is paper.txt 'elbow
fruit' && points=$((points + 3))
is paper.txt 'elbow
fruit' && [ ! -e poem.txt ] && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
