#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Replace north with mango in recipe.txt.
is recipe.txt 'mango
image candy
river' && points=$((points + 6))
# Make the folder work.
[ -d work ] && points=$((points + 6))
# Move index.txt into work.
is work/index.txt 'image' && points=$((points + 3))
is work/index.txt 'image' && [ ! -e index.txt ] && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 18))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
