#!/bin/sh
# Judges the workspace: the share of points reached goes to reward.txt. Needs nothing but sh and coreutils.
cd "${APP_DIR:-/app}" || exit 1
points=0
is() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# Make the folder store.
[ -d store ] && points=$((points + 6))
# Move guide.txt into store.
is store/guide.txt 'salad' && points=$((points + 3))
is store/guide.txt 'salad' && [ ! -e guide.txt ] && points=$((points + 3))

mkdir -p "${REWARD_DIR:-/logs/verifier}"
thousandths=$((points * 1000 / 12))
printf '%d.%03d\n' $((thousandths / 1000)) $((thousandths % 1000)) > "${REWARD_DIR:-/logs/verifier}/reward.txt"
