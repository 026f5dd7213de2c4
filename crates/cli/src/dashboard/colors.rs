//! The colours of the dashboard.
//!
//! The palette is Okabe and Ito's, which is safe for colour-blind readers. Whatever a colour shows, a symbol or a pattern shows as well.

use ratatui::style::Color;

pub(crate) const BLUE: Color = Color::Rgb(86, 180, 233);
pub(crate) const GREEN: Color = Color::Rgb(0, 158, 115);
pub(crate) const ORANGE: Color = Color::Rgb(230, 159, 0);
pub(crate) const YELLOW: Color = Color::Rgb(240, 228, 66);
pub(crate) const PURPLE: Color = Color::Rgb(204, 121, 167);
pub(crate) const VERMILLION: Color = Color::Rgb(213, 94, 0);
pub(crate) const GREY: Color = Color::Rgb(128, 128, 128);
