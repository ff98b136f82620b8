#!/bin/sh
# One right way to do it.
cd "${APP_DIR:-/app}" || exit 1
cp agenda.txt essay.txt
echo cabin > guide.txt
