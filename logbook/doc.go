// Package logbook keeps the latest lines that functions have printed, in memory and within bounds, so that they can be read
// by function and replica after the replica has gone, and followed as they come.
//
// Whoever hears a replica's output calls [Book.Add]. Who wants to read opens a [Reader] and calls [Reader.Read] until io.EOF.
// Readers hold no lines of their own: one that is slower than the writers finds the oldest lines gone and is told how many.
package logbook
