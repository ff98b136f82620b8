#!/bin/sh
# Judges the workspace: 1 when the call after the silence was carried out.
cd "${APP_DIR:-/app}" || exit 1
mkdir -p "${REWARD_DIR:-/logs/verifier}"
reward=0
[ -f notes.txt ] && [ "$(cat notes.txt)" = 'after the silence' ] && reward=1
echo "$reward" > "${REWARD_DIR:-/logs/verifier}/reward.txt"
