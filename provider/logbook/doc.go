// Package logbook keeps the latest lines that functions have printed, in memory and within bounds.
// They can be read by function and replica after the replica is gone, and followed as they come.
//
// The receiver of a replica's output calls [Book.Add]. To read lines, open a [Reader] and call
// [Reader.Read] until io.EOF. Readers hold no lines of their own. A reader that is slower than the
// writers misses the oldest lines and learns how many.
package logbook
