//! The common frame of all HTML pages: one file that loads nothing, in light and dark, also for narrow windows.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::figure::STYLE;
use crate::text::EscapedText;

const PAGE_STYLE: &str = include_str!("page.css");

/// A complete page around its main part. Text can reach it only through [`Markup`], which escapes markup, or a
/// [`crate::figure::Drawing`], which does the same; characters that change the direction of writing are escaped here.
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
    EscapedText::page(&page.into_string()).as_str().to_string()
}

/// A wide part, such as a table, that scrolls separately, with the keyboard as well.
pub fn scroll_box(label: &str, content: &Markup) -> Markup {
    html! { div.scroll tabindex="0" role="region" aria-label=(label) { (content) } }
}
