"""Why a job ends: one reason out of several reports."""
