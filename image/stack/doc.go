// Package stack reads stack.yml as faas-cli does: functions with all their fields, ${NAME:-default}
// from the environment, anchors and merge keys. It is stricter in one point. An unknown field is an
// error with its line, because a misspelt `anotations` would silently deploy a function without
// them.
//
// [Parse] is a function of its arguments. [Read] reads the file, and the files that its functions
// name with environment_file.
package stack
