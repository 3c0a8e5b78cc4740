// Package stack reads stack.yml as faas-cli does: functions with all their fields, ${NAME:-default} from the environment,
// anchors and merge keys. It is stricter in one thing: a field that it does not know is an error with its line, because a
// misspelt `anotations` would deploy a function without them and say nothing.
//
// [Parse] is a function of its arguments. [Read] reads the file, and the files that its functions name with
// environment_file.
package stack
