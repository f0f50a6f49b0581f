//! The common frame of all HTML pages: one file that loads nothing, has a light and a dark mode, and fits narrow
//! windows.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::figure::STYLE;
use crate::text::EscapedText;

const PAGE_STYLE: &str = include_str!("page.css");

/// Renders a complete page around its main part. Text reaches the page only through [`Markup`] or
/// [`crate::figure::Drawing`], which both escape it; this function also escapes characters that change the direction
/// of writing.
pub fn render_page(title: &str, main: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width,initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(PAGE_STYLE)) }
            }
            body { main { (main) } }
        }
    };
    EscapedText::for_page(&page.into_string())
        .as_str()
        .to_string()
}

/// Wraps a wide part, such as a table, in a box that scrolls separately, also by keyboard.
pub fn scroll_box(label: &str, content: &Markup) -> Markup {
    html! { div.scroll tabindex="0" role="region" aria-label=(label) { (content) } }
}
