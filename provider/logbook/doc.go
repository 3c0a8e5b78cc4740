// Package logbook keeps the latest lines that functions have printed, in memory and within bounds.
// The lines of a function or of a replica can be read after the replica has ended, and followed as
// they come.
//
// The receiver of a replica's output calls [Book.Add]. To read lines, open a [Reader] and call
// [Reader.Read] until io.EOF. A Reader has no copies of lines. If it is slower than the writers, it
// misses the oldest lines and learns how many.
package logbook
